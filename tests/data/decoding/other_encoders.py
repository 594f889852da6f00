"""Small JPEGs of kinds that neither Pillow nor simplejpeg writes, by libjpeg-turbo 2.1 and 3.1,
liblj92 and CharLS. All show `PIXELS`, or its red alone, at the depth that the name says."""

from base64 import b85decode
from zlib import decompress

import numpy as np

_ROWS, _COLUMNS = np.mgrid[:40, :36]
PIXELS = np.stack([5 * _ROWS + _COLUMNS, 6 * _COLUMNS, _COLUMNS * _ROWS // 8 + 60], axis=2).astype(
    np.uint8
)

FILES = {
    "lossless": decompress(
        b85decode(
            "c-qC1F;BxV5QU$crc{O^B1HmaW=NK9+1)IikgV=3s4QKWnCpcdi9cYZ4w)J02pek#;13`n#KK;4p-r7*V&eu&KKt"
            "JH?rit$KCwTVUYwm{iaOi_qCQd_2a^cn2t@?<h$DzP&<YXscib!Xf(gbb&;{OB^RMOI$8z}ew<RYP4a7i5aw;($1"
            "6U9o5*R3{G%}&E2+_HYv0KW*Afuy2N(l>jqS&@DJsWmY#0M6-Fk&PTR$!vD2DT;-l*d!1XZ=ko3v`WbyLjJlw%8j"
            "DZc3Ct*p`b+Fwx}7<B1$-W=NF&W?fb_%{MOYjqi4it?<j#Y}@?C#i?SVy<5fRUNJ*d?(tNXx1XSPF|>T<$a21wNK"
            "E?)$i<;%qN3Dn?*H%+=I-Si`IV90"
        )
    ),
    "lossless, grey": decompress(
        b85decode(
            "c-s4a<Npx`aRx>pU_b&)%#0lW4>NFcFlaESFfs@-{J+J(0aU@p!0`O<U39QIciU|^%3F)X$=!v_+4c&Vb9+?VFxP"
            "hA|4jfv0)gl"
        )
    ),
    "baseline": decompress(
        b85decode(
            "c-s4a<NpH&0WUXCHwH#V1_nkTWcYuZ!I^=Xi3x;&fCY$HIapa)SXjB(+1WUFxOjNDxwyG``Gf>``2_j6xdp@o1cg"
            "OJMMZh|#U;c<B!omnML>oyG6VInuyV4pa*FVB^NNrR{vTiv<Y3TXP+?{iWMC3xWEN!ne}q94>{MjH&IuHj6JTIuW"
            "ne~@V_{`eG-47|5mExmO95q=fe-=Mfc|1+Vh75}1C3{5WJS@-EXc&DsAQNZB>evt0}nGJ&;iVX4E79jFCMX2xY_c"
            "i<Ww7x#T~|uVWk^pYgK3-m;U{8!Dfpafm2yE9+%gfh^AR{Zd%dTy8Z02=1tBgOqKR@9+h^UWzzHW=Ju%Iy{!?qcr"
            "H5IZ4=D&XN|aBr?FtZG^fe(rZu^{<tH^|yivKd$V%+Jxs+ycd%=;ePij{(`82-GG~QgeWqH${Og4?xlcPCI7HpKt"
            "KPp<3oX9riLwK)w`A657i8maVx=i8SmuC{5%J;BR^og&;DVe|*lIdx$fEKMd#S<v5n<I0n=}PK;5x3LQ>?SKVOXe"
            "LF+|+mQtoDr=jX=kC{5m8yF)mhE&Y)c+y7uOtXrNn99O4PQ^+w{>Jno5Ye*({+ZI%w-+j`@0na1<a8?v*$sV&I;^"
            "l|a_M<PId^8arF0F1(^s{"
        )
    ),
    "arithmetic": b85decode(
        "|JeWF01!$>Nk#wx0RR9200961|JwjV00RO70|EjA0|NsD0|NvF2n7WM1O*BQ2L=cX3JeSj3JVJj4iXRz4iOF"
        "u3lJ6%5fc;@6%`B*7Z?^47!ni}6#v@*LjeN>1O)^I2?YfS6b%av6ciK`6ciK`6ciK`6ciK`6ciK`6ciK`6ci"
        "K`6ciK`6ciK`6ciK`6ciK`6ciK`6cqo-"
        "01*fPC;%h_0TBQK5di}c0sqVZ3IGrg1pyEd1^?Or3<CiG0ucid06zf#0PKu4L&Rq24}{w?ogjn@P<N!9$b`S"
        "Ml1GZiOQ6nCeg4crA%|N0bjrFL_5nq@UYB7QI-"
        "t4rkLd)U7F9}WzIrJ|dwF@m;SZN7%;6V;jg<M}pgZb>Cflw;nttdZJ!_`gXU}t%;EZV!e}z>CGjSqj`6?9dM"
        "YpNM_;&AzEH9WO3fM($M_g$#e|y8X;@PDb=Q!QjZkB+``e&0&M$%@s9=qK{lOh`&D>{spHu$L)&(U>u8j)GC"
        "lZEJEoCNA`r1Z$gS!xSfw>>tiT`U|%xi?&Pe$q0pbI<AxFpTBv>|4CbVgXZ<M?RkhV9gV85LjAt@!X;?!2j6"
    ),
    "arithmetic, progressive": decompress(
        b85decode(
            "c-s4a<NpH&0WUXCHwH#V1_nkTWcYuZ!I^=Xi3x;&fCY$HIapa)SXjB(+1WUFxOjNDxwyG``Gf>``2_j6xdp@o1cg"
            "OJMMZh|#U;c<B!omnML>oyG6VInuyV4pa*FVB^NNrR{-0tH<Y3TXP+?{iWMC3xWEN!ne};jLL4Z-<|1Aa{W<~}k0"
            "cHW9v;Q;P)NbT&HF+GY_)wz%qeT4@u5(;bwex<8EEnB+|38D$=Y1uMq}0xvFpJ(R;&EkPWc*7&mDkOw<=+Vf#zkI"
            "i4S~P<&(D1zvwQvvpam=ftU%*AfC0kD$|R~2_~XrdMFD?L*%0^3cf`c6^SwH?cu99Wf9j0RbXAaYL5Ol@Mn-!^7q"
            "#O0qch^pD>OT`&;L^8D5CJ^!6FAFRZJjN&O%F!SA_DXoIBc76?~T~#(Gh4dBzM26ua5%nKqz0#$NGi$>oR#f-l*Z"
            "&(9Y&-4cHc777f^3=9kcr-N(r<%)ZkC^w+FO5n0XGfUa6R#rCM?_cB0r)PFe(^5cllfbR>UO&Eg%q+0ZZM!0(=zw"
            "Omz)CL9f|EZ}vJ~_uDxEed6~2)7&e-z7|C<1jBc>$"
        )
    ),
    "12 bits": decompress(
        b85decode(
            "c-s4a<NpH&0WUXCHwH#V1_nkTWcYuZ!I^=H5d=Ua69}*{gGg2u7G@SURyH;;X6NJpVs<t*4sH%kE)W2+c(}QEK%D"
            ";v8Mt{EG#FGE83h^sA7Ky!nh!J^32<@p0>zaC7#LWYS(uR|IJq@kO@baVvaqWMCMNyA#lQj5Y0q%fUU$pn3~AGi5"
            "-kkTnQ9lzvXcxs7`9#VU66C_NRj|!?vmLKH`jI?iRR<-G++D8clH_gwRTPc!%vg@|C<15%7tD"
        )
    ),
    "lossless, 12 bits": decompress(
        b85decode(
            "c-s4a<Npx`aRx>pU_b(F?5sTh4>NG{FlaESFfs@-{J+J(0aU@p!0`M(!v(@%g+{<ar&cZz9Mqx(_+%G4bv5CWZRO"
            "I!D=VTgYW=A7qt=gFPi5;F{@(-u-=34G"
        )
    ),
    "JPEG-LS": decompress(
        b85decode(
            "c-s4a<Npf=h2Q{BH#Y_*1_nk31_livR^j4c1F{))Kp3ck11QG$|Hl9C4BQ+*1uBe;f(-v}F>o+~G%&2)_ILmP`rq"
            "~c>z`c$GX58Wh&p8;QU4A^{Imy=`*9KWaH1Zh55)KjB7TF2?;zqmh`0~efU1nDFya4A08+T8Z2"
        )
    ),
    "lossless, 16 bits": decompress(
        b85decode(
            "c-s4a<Npx`aRx>pU_b&~+?)dc4>NEJFlaESFfs@-{J+J(0aU@p!0?vg0x!vE1ye%+7o&p)E5ia2qL@qzNKy`Day5"
            "{o9LUrnO*xP`>WxuvjCy0#8>8MB^~R9*2E+fG0J9*35C"
        )
    ),
}
